"""Rotary positions as a `config.json` gives them."""

from collections.abc import Mapping
from typing import Any

from rqjax.core import check_int, check_positive
from rqjax.nn.families import Family
from rqjax.nn.fields import need_object
from rqjax.rotations import Rope


def turning(fields: Mapping[str, Any], layers: int) -> list[bool]:
    """Returns which layers have rotary positions."""
    if fields.get("no_rope_layers") is not None:
        found = [bool(turns) for turns in fields["no_rope_layers"]]  # 1 is a layer with one, despite the name
        if len(found) != layers:
            raise ValueError(f"expected no_rope_layers of {layers} numbers, got {len(found)}")
        return found
    if "no_rope_layer_interval" not in fields:
        return [True] * layers
    interval = check_int("no_rope_layer_interval", fields["no_rope_layer_interval"], 1, 2**20)
    return [(i + 1) % interval != 0 for i in range(layers)]


def rope(family: Family, fields: Mapping[str, Any], context: int | None, local: bool, turns: bool) -> Rope:
    """Makes the rotary embedding of a layer."""
    if not turns:
        return Rope(1.0, "none")
    parameters = rope_parameters(family, fields, local)
    kind, share = parameters["rope_type"], parameters.get("partial_rotary_factor", fields["partial_rotary_factor"])
    share = 1.0 if share is None else check_positive("partial_rotary_factor", share)
    if not family.partial and share != 1:
        if kind != "default":
            raise ValueError(f"expected no partial_rotary_factor beside a rope_type {kind!r}, got {share}")
        share = 1.0  # Hugging Face's classes of these families do not read it
    long = True
    if kind == "longrope":
        longest = check_int("max_position_embeddings", fields["max_position_embeddings"], 1, 2**31)
        context = longest if context is None else check_int("context", context, 1, longest)
        long = context > parameters["original_max_position_embeddings"]
    theta = check_positive("rope_theta", parameters["rope_theta"])
    return Rope.parse(theta, parameters, fields.get("turning_share", share), long=long)


def rope_parameters(family: Family, fields: Mapping[str, Any], local: bool) -> dict[str, Any]:
    """Returns the parameters of a layer's rotary embedding, from where transformers 4 or 5 writes them.

    `rope_scaling` comes before `rope_parameters`, and fields within them before fields beside them. Each of Gemma 3's
    layers has one of two embeddings.
    """
    scaling, parameters = (need_object(fields, name) for name in ("rope_scaling", "rope_parameters"))
    theta = "rope_theta"
    if "rope_local_base_freq" in fields:
        rope = need_object(parameters, "sliding_attention" if local else "full_attention") or {"rope_type": "default"}
        rope, theta = (rope, "rope_local_base_freq") if local else ({**rope, **scaling}, theta)
    else:
        rope = scaling or (family.rope if fields["rope_parameters"] is None else parameters)
        if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
            raise ValueError(f"expected rope_parameters of all layers alike in config.json, got some of {nested[0]!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kinds := family.rope_types:
        if kind not in list(kinds):
            raise ValueError(f"unsupported rope_type {kind!r} in config.json; supported: {', '.join(kinds)}")
        kind = kinds[kind]
    rope = {"rope_theta": fields[theta], **rope, "rope_type": kind}
    if kind in ("llama3", "yarn", "longrope"):
        longest, length = fields["max_position_embeddings"], "original_max_position_embeddings"
        rope[length] = fields.get(length) or rope.get(length, longest)
        check_int(length, rope[length], 1, 2**31)
        if rope.get("factor") is None and ("factor" in rope or kind == "longrope"):
            rope["factor"] = check_int("max_position_embeddings", longest, 1, 2**31) / rope[length]
    return rope
