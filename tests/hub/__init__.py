"""A hub on loopback: the routes of the Hugging Face hub that downloads use, with switches for what can fail."""
