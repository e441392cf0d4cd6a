"""Draw the pictures of the documentation as SVG, in one style."""
