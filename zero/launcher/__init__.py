"""DeepSpeed's `deepspeed.launcher`, of which `accelerate launch` reads a name; `onebit launch` starts ranks here."""
