"""Search strategies, one a file, and the tuner loop."""
