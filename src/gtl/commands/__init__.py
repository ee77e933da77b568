"""The verbs of the command line, one group a file. Only these and `train/` know configuration."""
