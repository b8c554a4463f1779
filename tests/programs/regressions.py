"""Programs that failed once, made small. Paste new ones here, as the campaign prints them."""

from __future__ import annotations

REGRESSIONS: list[str] = [
    """
    stage=2 ranks=1
    forward(b, g, tensor, 1)
    forward(a, g, tensor, 0)
    backward(b, loss, first, False)
    backward(a, engine, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=0 ranks=1
    forward(c, g, tensor, 3)
    backward(c, loss, first, False)
    clip(g, norm, 0.05)
    """,
    """
    stage=0 ranks=1
    forward(b, g, tensor, 2)
    backward(b, loss, first, False)
    clip(g, value, 0.5)
    """,
    """
    stage=1 ranks=1
    forward(a, g, tensor, 2)
    backward(a, loss, first, False)
    grad(g, add_, blocks.1.up.weight, 84)
    step(g)
    look(g, gathered)
    """,
    """
    stage=1 ranks=1
    grad(g, set, blocks.1.down.weight, 93)
    step(g)
    forward(b, g, tensor, 3)
    """,
    """
    stage=3 ranks=1 offload=params
    forward(a, g, tensor, 5)
    backward(a, loss, first, False)
    forward(c, g, tensor, 7)
    """,
    """
    stage=2 ranks=1 offload=cpu
    forward(b, g, tensor, 6)
    backward(b, engine, first, False)
    evaluate(g, no_grad, 2)
    """,
    """
    stage=2 ranks=1 dtype=float32 offload=nvme
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    look(g, gathered)
    """,
    """
    stage=2 ranks=1 engines=2
    forward(b, d, tensor, 8)
    backward(b, loss, first, False)
    zero_grad(d, module, False)
    step(d)
    look(d, gathered)
    """,
    """
    stage=3 ranks=1
    forward(a, g, tensor, 5)
    backward(a, loss, first, False)
    zero_grad(g, optimizer, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=1 loop=before
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=0 ranks=1 loop=after
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=1
    forward(a, g, namespace, 1)
    backward(a, loss, both, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=1
    forward(a, g, changed view, 1)
    backward(a, loss, both, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=1
    forward(a, g, kept weight, 1)
    backward(a, loss, both, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=1 ranks=1
    forward(a, g, recomputed, 9)
    backward(a, engine, first, False)
    step(g)
    """,
    """
    stage=2 ranks=1
    forward(a, g, caller's list, 9)
    """,
    """
    stage=3 ranks=1
    forward(a, g, tensor, 1)
    edit(g, data[0]=, blocks.0.up.weight, 29)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=2
    forward(b, g, tensor, 1)
    edit(g, data[0]=, scale, 43)
    step(g)
    look(g, gathered)
    """,
    """
    stage=1 ranks=2
    forward(a, g, tensor, 2)
    backward(a, engine, first, False)
    grad(g, read is None, side.weight, 46)
    """,
    """
    stage=0 ranks=2
    grad(g, set, blocks.1.up.bias, 45)
    evaluate(g, inference, 6)
    step(g)
    """,
    """
    stage=3 ranks=1 dtype=float32 offload=nvme
    forward(a, g, tensor, 6)
    edit(g, data.copy_, blocks.0.up.bias, 58)
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=1
    grad(g, set, head.weight, 97)
    zero_grad(g, optimizer, True)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=1 accumulation=2
    forward(c, g, tensor, 6)
    grad(g, set, head.weight, 48)
    backward(c, loss, first, False)
    clip(g, norm, 0.5)
    """,
    """
    stage=3 ranks=1
    forward(a, g, tensor, 7)
    backward(a, engine, first, False)
    grad(g, none, blocks.1.up.weight, 75)
    safe_grad(g, get, blocks.1.up.weight, 26)
    """,
    """
    stage=3 ranks=1 dtype=float32 offload=nvme
    fail(g, backward, 6)
    edit(g, data[0]=, blocks.1.up.weight, 25)
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=1 ranks=1
    forward(a, g, tensor, 4)
    backward(a, engine, first, False)
    zero_grad(g, each, False)
    safe_grad(g, get, scale, 22)
    """,
    """
    stage=1 ranks=2 loop=before
    forward(a, g, kept side, 8)
    backward(a, engine, first, False)
    step(g)
    safe_grad(g, get, blocks.1.down.weight, 43)
    """,
    """
    stage=3 ranks=2 offload=params
    forward(a, g, tensor, 5)
    edit(g, data[0]=, head.weight, 98)
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=2 ranks=1 dtype=float32 offload=cpu
    forward(c, g, tensor, 8)
    backward(c, engine, first, False)
    step(g)
    remember(g, optimizer)
    forward(c, g, part alone, 5)
    recall(g, optimizer)
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=2 ranks=1
    forward(c, g, tensor, 4)
    remember(g, engine.optimizer)
    backward(c, engine, first, False)
    step(g)
    recall(g, engine.optimizer)
    """,
    """
    stage=0 ranks=2 dtype=float32 offload=cpu
    forward(a, g, caller's dict, 8)
    backward(a, engine, second, False)
    forward(b, g, caller's dict, 7)
    step(g)
    rate(g, engine, 2.0)
    remember(g, optimizer)
    forward(b, g, side, 4)
    backward(b, loss, first, True)
    """,
    """
    stage=2 ranks=2 loop=before
    remember(g, engine.optimizer)
    step(g)
    recall(g, engine.optimizer)
    """,
    """
    stage=0 ranks=2 clip=0.2
    forward(c, g, tensor, 5)
    backward(c, loss, first, False)
    grad(g, add_, side.weight, 41)
    step(g)
    forward(a, g, tensor, 9)
    """,
    """
    stage=2 ranks=2
    forward(a, g, tensor, 8)
    remember(g, optimizer)
    backward(a, engine, first, False)
    step(g)
    recall(g, optimizer)
    save(g)
    """,
    """
    stage=1 ranks=2 loop=before
    save(g)
    rate(g, engine, 2.0)
    load(g)
    forward(z, g, tensor, 90)
    backward(z, loss, first, False)
    step(g)
    look(g, gathered)
    """,
    """
    stage=3 ranks=2 loop=after
    forward(c, g, kept side, 8)
    backward(c, loss, first, False)
    step(g)
    grad(g, read norm, blocks.0.up.bias, 18)
    """,
]
