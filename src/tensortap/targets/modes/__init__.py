"""Modes: named variants of a target, declared by it or built in."""
