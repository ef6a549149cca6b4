"""Speculative decoding: tokens that are guessed, and verified several at a time."""
