"""Requantise the default model's Q4_1 tensors to Q4_0, for which llama.cpp has repacked CPU kernels.

    pip install gguf
    python benchmarks/requantise.py ~/.cache/weighbridge/models/smollm2-135m-instruct.gguf smollm2-q4_0.gguf

Everything else in the file stays as it is. Quality was not evaluated: the result is for load tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

FILE_TYPE_Q4_0 = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    reader = GGUFReader(arguments.source)
    writer = GGUFWriter(arguments.target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        value = FILE_TYPE_Q4_0 if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.Q4_1:
            values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            packed = quants.quantize(values, GGMLQuantizationType.Q4_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
