"""Whole screens: the two modes (chat, monitor) and the two modals (models, help)."""
