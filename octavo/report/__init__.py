"""Reports: one HTML file that needs no other, with figures as tables and as pictures, for a screen and for paper."""
