"""The update rules of parameters. A rule defines the state, the units and the step of an optimizer.

    rule = choice(settings.optimizer)(Parameter("layers.3.ffn.w_down.weight", (64, 168), inside=True))
    rule.vectors, rule.unit_size            # its state vectors, and the maximum size of units
    launch = rule.launch(units, ops, device, decay)
    launch(state, grad, lr=lr, step=step, scale=scale, undo=None)

`numerics.optimizer` holds the state and works with any rule. These modules do not import torch, because the planner
uses them too.
"""
