"""The paper's experiments, whole programs on top of the library."""
