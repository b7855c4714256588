"""What tells whether it pays, and the command line."""
