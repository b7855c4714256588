"""One cache for all layers: buffers, windows, recurrent states, and what users hand in and get back."""
