"""One program for each library that `benchmarks.comparison` runs.

Each is called with the folder that `benchmarks.comparison` has written, times
its library in turns, and prints what it measured as one line of JSON. None
imports the library of another, so each can run in an environment of its own.
"""
