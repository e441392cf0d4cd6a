"""Lists of runs: the tables of the paper, and VTAB-1k."""
