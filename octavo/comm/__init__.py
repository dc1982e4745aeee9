"""How ranks communicate: processes of one host, of several hosts, or devices."""
