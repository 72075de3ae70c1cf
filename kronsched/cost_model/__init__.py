"""Features of a candidate and the models that rank by them."""
