"""The packages whose source may enter the corpus, each with the licence a person read in it.

The list is an allow-list: a package that is not here is never downloaded, and a package whose own metadata
contradicts the licence given here is refused when the corpus is built. Packages under LGPL, GPL or MPL, and
packages that are mostly data, generated clients or somebody else's vendored code, were left out on purpose.
"""

from __future__ import annotations

# SPDX identifiers that are accepted at all.
PERMISSIVE = frozenset(
    {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "ISC", "0BSD", "MIT OR Apache-2.0"}
    | {"Apache-2.0 OR BSD-2-Clause", "Apache-2.0 OR MIT"}
)

_MIT = """
more-itertools rich sqlalchemy:4.5 pydantic fastapi h11 h2 anyio attrs cattrs pytest black marshmallow twisted:4.5
jedi parso mypy lark pyparsing typer peewee alembic mako jsonschema pluggy virtualenv pendulum redis setuptools tox
tomlkit graphql-core bottle mongoengine beautifulsoup4 html5lib cachetools optuna einops gymnasium isort
fonttools:4 beartype fluids trimesh meshio pymatgen:4 galois gpytorch botorch lifelines pulp simpy pyqtgraph:3 manim
zarr nibabel textual:3 gunicorn platformdirs filelock structlog
"""
_BSD3 = """
mpmath boltons sympy:8 networkx:5 toolz numpy:6 scipy:8 scikit-learn:6 pandas:6 django:5 flask werkzeug jinja2 click
starlette uvicorn httpx httpcore celery ipython seaborn statsmodels:5 dask distributed astropy:6 bokeh joblib
prompt-toolkit dateparser scrapy kombu pint shapely lmfit nbconvert jupyter-server jupyter-client traitlets control
rdflib fsspec mlxtend river:3 photutils pvlib qutip:4 djangorestframework markdown mistune w3lib parsel passlib
nilearn:4 mne:6 metpy geopandas skorch uncertainties websockets scikit-bio:3 cloudpickle dill sunpy:3
"""
_BSD2 = "sphinx mkdocs imageio invoke wrapt"
_APACHE = """
sortedcontainers requests tornado aiohttp xarray coverage arrow keras:4 transformers:4 accelerate datasets flax optax
pyro-ppl:3 numpyro torchmetrics:3 cvxpy:3 streamlit:2 huggingface-hub falcon pymongo darts:3 pennylane:5 cirq-core:4
luigi mesa arviz:2
"""


def _parse(names: str, licence: str) -> dict[str, tuple[str, float]]:
    """`name` or `name:cap` (cap in MB of cleaned text)."""
    table = {}
    for item in names.split():
        name, _, cap = item.partition(":")
        table[name] = (licence, float(cap) if cap else 2.2)
    return table


def reviewed_packages() -> dict[str, tuple[str, float]]:
    """Package name -> (licence, cap in MB), in a fixed order."""
    merged: dict[str, tuple[str, float]] = {}
    for names, licence in (
        (_BSD3, "BSD-3-Clause"),
        (_MIT, "MIT"),
        (_APACHE, "Apache-2.0"),
        (_BSD2, "BSD-2-Clause"),
    ):
        for name, entry in _parse(names, licence).items():
            merged.setdefault(name, entry)
    return merged
