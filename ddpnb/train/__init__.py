"""What a training function is made of: wrapping, loading, accumulating, the loop, reductions over ranks.

Every helper works in a ddpnb worker, under torchrun, and alone in a process of its own (a world of one), and stands for
a few lines of torch that its docstring shows.

Runs in: worker (and wherever else the function is called)
"""
