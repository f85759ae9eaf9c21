"""Drop-in optimizers for PyTorch that exchange about one bit per parameter."""
