"""What programs share: the command line, and the flags that several of them take."""
