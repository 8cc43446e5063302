"""What every part of the package may use: problems, chips, files, processes, messages."""
