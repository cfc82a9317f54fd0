"""Durable copies: files in a directory or behind a URL, and the packs that are kept in them."""
