"""The policy room: who holds which block and what each step does. No torch here."""
