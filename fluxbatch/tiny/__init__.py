"""Where the embedded models lie, each in diffusers' layout with weights in float16: a FLUX.1 and a FLUX.2 of some 8 M
parameters. A folder that is not there is of a model that has no weights yet."""

from pathlib import Path

FOLDERS = {  # under the names that conf/model/ has
    "tiny": Path(__file__).parent / "model",
    "tiny_flux2": Path(__file__).parent / "model_flux2",
}
FOLDER = FOLDERS["tiny"]
NAMES = {"flux1": "tiny", "flux2": "tiny_flux2"}  # of the embedded model of each family
