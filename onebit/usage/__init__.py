"""Usage: gradients, parameters and states as torch's users treat them."""
