"""Text in and out of token ids. No torch here."""
