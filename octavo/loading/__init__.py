"""From files to filled parameters."""
