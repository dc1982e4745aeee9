"""How a linear layer keeps and applies its weights."""
