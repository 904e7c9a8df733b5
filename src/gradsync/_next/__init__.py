"""Rooms that are being rebuilt; nothing public imports them yet."""
