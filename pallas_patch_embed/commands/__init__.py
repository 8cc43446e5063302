"""What a person types: the command line and its commands."""
