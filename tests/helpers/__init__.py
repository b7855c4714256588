"""Models, calls and comparisons that several files of tests share."""
