"""Scalable topics: layouts that split and merge, the controller that changes them, and the consumers it assigns segments to."""
