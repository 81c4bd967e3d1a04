#!/usr/bin/env python3
"""Turn published ONNX Attention cases into tests/cases/onnx.

requirements: numpy

Run:  python3 tests/import_onnx.py FOLDER

FOLDER holds one folder a case: case.json (attributes, sizes and types) and
one .npy file a tensor, named by its role in the operator. The arrays are
copied as they are; case.json becomes case.txt, whose lines are described in
tests/cases/onnx/README.md.
"""

import json
import os
import shutil
import sys

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cases", "onnx")


def lines_of(case):
    a = case["attributes"]
    yield "op attention"
    yield "dtype " + case["dtype"]
    yield "opset %d" % case["opset"]
    d = case["dims"]
    yield "heads %d %d" % (d["q_heads"], d["kv_heads"])
    yield "causal %d" % a["is_causal"]
    if a["scale"] is not None:
        yield "scale " + float(a["scale"]).hex()
    if a["softcap"]:
        yield "softcap " + float(a["softcap"]).hex()
    for side in ("left", "right"):
        if a[side + "_window_size"] != -1:
            yield "window_%s %d" % (side, a[side + "_window_size"])
    if "qk_matmul_output" in case["outputs"]:
        yield "qk_mode %d" % a["qk_matmul_output_mode"]
    yield "source %s %s %s" % (case["source"]["repository"],
                               case["source"]["commit"],
                               case["source"]["licence"])
    yield "tensors " + " ".join(
        list(case["inputs"]) + list(case["outputs"]))


def main(source):
    for name in sorted(os.listdir(source)):
        folder = os.path.join(source, name)
        if not os.path.exists(os.path.join(folder, "case.json")):
            continue
        with open(os.path.join(folder, "case.json")) as f:
            case = json.load(f)
        target = os.path.join(HERE, name)
        shutil.rmtree(target, ignore_errors=True)
        os.makedirs(target)
        for role, t in {**case["inputs"], **case["outputs"]}.items():
            to = os.path.join(target, role + ".npy")
            shutil.copyfile(os.path.join(folder, t["file"]), to)
        with open(os.path.join(target, "case.txt"), "w") as f:
            f.write("\n".join(lines_of(case)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
