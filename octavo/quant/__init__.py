"""How a linear layer stores and applies its weights."""
