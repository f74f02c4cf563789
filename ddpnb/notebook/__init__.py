"""What a notebook's page shows of a run: a live card while it goes on, its figure once it has ended.

Runs in: kernel
"""
