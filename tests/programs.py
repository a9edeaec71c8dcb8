"""What a traced program consists of."""

import jax


def equations(jaxpr, around=()):
    """Every equation of a program, however deep, with the names of the primitives around it, outermost first."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation, around
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from equations(inner, (*around, equation.primitive.name))


def kernels_in(jaxpr):
    """Names of the kernels in a program, once for every call."""
    calls = (e.params for e, _ in equations(jaxpr) if e.primitive.name == "pallas_call")
    return sorted(str(p.get("name") or p["name_and_src_info"].name) for p in calls)
