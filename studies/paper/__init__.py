"""The tables of the paper by one command, made of runs."""
