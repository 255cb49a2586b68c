"""The built-in backends: the same file names and the same functions in the same order in each."""
