"""A server measured from outside: when requests arrive, what their clients saw, and what that comes to."""
