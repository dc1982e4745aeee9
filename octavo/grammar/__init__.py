"""Grammars that answers follow: their text, their trial before they are accepted, and the masks of each step."""
