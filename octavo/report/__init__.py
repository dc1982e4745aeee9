"""Reports: a file of HTML that needs nothing else, says its figures as tables and as pictures, and prints."""
