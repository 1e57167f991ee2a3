"""The output projections of the published models and of the demonstration model (configs/models/)."""

import dataclasses

from pallas_kernels.dense.specs import PRODUCTS, ProductSpec


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """Both matrices of one model; their input's types and the weight scales' block stand in them."""

    first: ProductSpec
    second: ProductSpec


SPECS = {
    model: OutputSpec(PRODUCTS[f"{model} wo_a"], PRODUCTS[f"{model} wo_b"])
    for model in ("v4-flash", "v4.1-flash", "demo")
}
