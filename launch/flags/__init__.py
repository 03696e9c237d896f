"""Common code of the programs: the command line, and flags that several programs have."""
