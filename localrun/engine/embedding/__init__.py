"""Engines that turn texts into vectors and scores: the process's other job, beside generating."""
