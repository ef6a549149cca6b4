"""Offline work: uploaded files, and batches of requests that run beside interactive use and go on after a restart."""
