"""What DeepSpeed's users find: its engine's names, its arguments, optimizers that they have made, parameters whole."""
