"""One program for each library that `benchmarks.comparison` runs.

Each receives the folder that `benchmarks.comparison` has written, times its
library, and prints one line of JSON. None imports the library of another, so
each can run in an environment of its own.
"""
