# pyright: reportMissingImports=false
"""CHGNet, the energy of a crystal and the forces on its atoms.

    pip install chgnet

Crystals of 40 atoms by their measured lattice constants (pymatgen builds the cells), strained and shaken; whole
compounds are held out. The metric is 1 less the relative error, against the original, of the forces or of the energies,
whichever is larger.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.models.trained.task import Inputs, Trained, package_folder

ATOMS = 40
SEARCH_CALLS, HELD_OUT_CALLS = 12, 24
ROCK_SALT = ("Fm-3m", ((0, 0, 0), (0.5, 0.5, 0.5)), (5, 1, 1))
ZINC_BLENDE = ("F-43m", ((0, 0, 0), (0.25, 0.25, 0.25)), (5, 1, 1))
PEROVSKITE = ("Pm-3m", ((0, 0, 0), (0.5, 0.5, 0.5), (0.5, 0.5, 0)), (2, 2, 2))
"""Space group, places of the elements in the cell, and how often the cell is repeated."""
COMPOUNDS: dict[tuple[str, ...], tuple[float, tuple[Any, Any, Any]]] = {
    ("Mg", "O"): (4.21, ROCK_SALT),
    ("Ga", "As"): (5.65, ZINC_BLENDE),
    ("Sr", "Ti", "O"): (3.91, PEROVSKITE),
    ("Na", "Cl"): (5.64, ROCK_SALT),
    ("Zn", "S"): (5.41, ZINC_BLENDE),
    ("K", "Ta", "O"): (3.99, PEROVSKITE),
    ("Ca", "O"): (4.81, ROCK_SALT),
    ("Si", "C"): (4.36, ZINC_BLENDE),
    ("Ba", "Ti", "O"): (4.00, PEROVSKITE),
    ("Ni", "O"): (4.18, ROCK_SALT),
    ("In", "P"): (5.87, ZINC_BLENDE),
    ("La", "Al", "O"): (3.79, PEROVSKITE),
}
"""Elements → the cell's edge in Å, and the structure. Every second one is held out."""
STRAIN, SHAKEN = 0.03, 0.08
"""Largest strain, and the distance in Å by which atoms are moved."""
FAR = 100.0
"""Length in Å of the bonds that fill a call up: beyond every cutoff, so that they carry nothing."""
STEP = 64
"""Bonds and angles are filled up to a multiple of 64."""


class Chgnet(nn.Module):
    """A crystal's graph → (energy per atom in eV without the elements' own, forces in eV/Å)."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.atom_embedding = found.atom_embedding
        self.radial_ag = found.bond_basis_expansion.rbf_expansion_ag
        self.radial_bg = found.bond_basis_expansion.rbf_expansion_bg
        self.frequencies = found.angle_basis_expansion.fourier_expansion.frequencies
        self.bond_embedding, self.angle_embedding = found.bond_embedding, found.angle_embedding
        self.bond_weights_ag, self.bond_weights_bg = found.bond_weights_ag, found.bond_weights_bg
        self.atom_layers, self.bond_layers = found.atom_conv_layers, found.bond_conv_layers
        self.angle_layers = found.angle_layers
        self.readout_norm, self.mlp = found.readout_norm, found.mlp

    def forward(self, positions_N3: torch.Tensor, *graph: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            free_N3 = positions_N3.detach().requires_grad_()
            energy = self.energy(free_N3, *graph)
            (slopes_N3,) = torch.autograd.grad(energy, free_N3)
        return (energy.detach() / len(positions_N3)).reshape(1), -slopes_N3

    def energy(
        self,
        positions_N3: torch.Tensor,
        numbers_N: torch.Tensor,
        shifts_E3: torch.Tensor,
        edges_E2: torch.Tensor,
        undirected_E: torch.Tensor,
        directed_U: torch.Tensor,
        angles_A5: torch.Tensor,
    ) -> torch.Tensor:
        centers_E, neighbors_E = edges_E2[:, 0], edges_E2[:, 1]
        bonds_E3 = positions_N3[centers_E] - positions_N3[neighbors_E] - shifts_E3
        lengths_E = bonds_E3.square().sum(1).sqrt()
        directions_E3 = bonds_E3 / lengths_E[:, None]
        bases_UR = self.radial_ag(lengths_E[directed_U])
        atoms, bonds = self.atom_embedding(numbers_N - 1), self.bond_embedding(bases_UR)
        atom_weights_E = self.bond_weights_ag(bases_UR)[undirected_E]
        weights_U = self.bond_weights_bg(self.radial_bg(lengths_E[directed_U]))
        centers_A, first_A, second_A = angles_A5[:, 0], angles_A5[:, 1], angles_A5[:, 3]
        bond_weights_A = weights_U[first_A] * weights_U[second_A]
        angles = self.angle_embedding(
            self.fourier(directions_E3[angles_A5[:, 2]], directions_E3[angles_A5[:, 4]])
        )
        for place, atom_layer in enumerate(self.atom_layers):
            pairs = torch.cat([atoms[centers_E], bonds[undirected_E], atoms[neighbors_E]], 1)
            messages = atom_layer.twoBody_atom(pairs) * atom_weights_E
            atoms = atoms + atom_layer.mlp_out(torch.zeros_like(atoms).index_add(0, centers_E, messages))
            if place == len(self.bond_layers):
                break
            bond_layer = self.bond_layers[place]
            triples = torch.cat([bonds[first_A], bonds[second_A], angles, atoms[centers_A]], 1)
            messages = bond_layer.twoBody_bond(triples) * bond_weights_A
            bonds = bonds + bond_layer.mlp_out(torch.zeros_like(bonds).index_add(0, first_A, messages))
            triples = torch.cat([bonds[first_A], bonds[second_A], angles, atoms[centers_A]], 1)
            angles = angles + self.angle_layers[place].twoBody_bond(triples)
        return self.mlp(self.readout_norm(atoms)).sum()

    def fourier(self, one_A3: torch.Tensor, other_A3: torch.Tensor) -> torch.Tensor:
        turns_AF = ((one_A3 * other_A3).sum(1) * (1 - 1e-6)).acos()[:, None] * self.frequencies
        mean_A1 = torch.full_like(turns_AF[:, :1], 0.5**0.5)
        return torch.cat([mean_A1, turns_AF.sin(), turns_AF.cos()], 1) / torch.pi**0.5


@dataclass
class EnergiesAndForces:
    """1 less the larger relative error: of all forces, or of energies over their spread."""

    calls: list[Inputs]
    energies: torch.Tensor
    forces: torch.Tensor
    __name__: str = field(default="1 less the relative error of energies and forces")

    def __call__(self, model: nn.Module) -> float:
        energies, forces = predicted(model, self.calls)
        spread = (self.energies - self.energies.mean()).abs().mean()
        of_energies = (energies - self.energies).abs().mean() / spread
        of_forces = (forces - self.forces).abs().mean() / self.forces.abs().mean()
        return 1 - max(of_energies, of_forces).item()


@torch.no_grad()
def predicted(model: nn.Module, calls: list[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the energies and forces of all calls."""
    energies, forces = zip(*(model(*call) for call in calls), strict=True)
    return torch.cat(energies).double(), torch.cat(forces).double()


def chgnet() -> Trained:
    """Return CHGNet 0.3.0 with crystals of six compounds to search by, and of six others.

    The model is the graph of energies and their derivative: torch.export takes none that asks for a derivative itself.
    OpenVINO 2026.4 does not convert it: it knows no `silu_backward`, and of a layer norm the first result alone.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    found = original()
    names = list(COMPOUNDS)
    graphs = [
        [found.graph_converter(crystal) for crystal in crystals(names[half::2], count, seed=half)]
        for half, count in ((0, SEARCH_CALLS), (1, HELD_OUT_CALLS))
    ]
    wanted = [
        max(len(sizes(graph)[kind]) for half in graphs for graph in half) // STEP * STEP + STEP
        for kind in range(3)
    ]
    search, held_out = ([filled(graph, wanted) for graph in half] for half in graphs)
    model = make_fx(Chgnet(found).eval().requires_grad_(False))(*search[0])
    return Trained(
        model=model,
        search=search,
        search_metric=EnergiesAndForces(search, *predicted(model, search)),
        held_out=held_out,
        held_out_metric=EnergiesAndForces(held_out, *predicted(model, held_out)),
        higher_is_better=True,
        source=f"chgnet 0.3.0; {len(COMPOUNDS)} compounds built by pymatgen",
    )


def original() -> Any:
    """Return the package's model, without the notices that it prints."""
    package_folder("chgnet")
    from chgnet.model.model import CHGNet

    with contextlib.redirect_stdout(io.StringIO()):
        return CHGNet.load(use_device="cpu", verbose=False).eval()


def crystals(compounds: list[tuple[str, ...]], count: int, *, seed: int) -> list[Any]:
    """Return structures of these compounds in turns, strained and shaken."""
    from pymatgen.core import Lattice, Structure

    draw = torch.Generator().manual_seed(seed)
    found = list[Any]()
    for place in range(count):
        elements = compounds[place % len(compounds)]
        edge, (group, sites, repeats) = COMPOUNDS[elements]
        cell = Structure.from_spacegroup(group, Lattice.cubic(edge), elements, sites).make_supercell(repeats)
        strain = torch.eye(3) + STRAIN * (2 * torch.rand(3, 3, generator=draw) - 1)
        moved = torch.randn(ATOMS, 3, generator=draw) * SHAKEN / 3**0.5
        crystal = Structure(Lattice(cell.lattice.matrix @ strain.numpy()), cell.species, cell.frac_coords)
        places = crystal.cart_coords + moved.numpy()
        found.append(Structure(crystal.lattice, cell.species, places, coords_are_cartesian=True))
    return found


def sizes(graph: Any) -> tuple[Any, Any, Any]:
    """Return what a graph has of directed bonds, of undirected ones, and of angles."""
    return graph.directed2undirected, graph.undirected2directed, graph.bond_graph


def filled(graph: Any, wanted: list[int]) -> Inputs:
    """Return the graph as a call, with bonds and angles that carry nothing up to the wanted counts."""
    lattice, positions = graph.lattice.detach(), graph.atom_frac_coord.detach() @ graph.lattice.detach()
    directed, undirected, angles = (wanted[kind] - len(have) for kind, have in enumerate(sizes(graph)))
    last_E, last_U = wanted[0] - 1, wanted[1] - 1
    shifts = torch.cat([graph.neighbor_image @ lattice, torch.tensor([[FAR, 0.0, 0.0]]).repeat(directed, 1)])
    fill = torch.tensor([[0, last_U, last_E, last_U, last_E]]).repeat(angles, 1)
    return (
        positions,
        graph.atomic_number.long(),
        shifts,
        torch.cat([graph.atom_graph.long(), torch.zeros(directed, 2, dtype=torch.long)]),
        torch.cat([graph.directed2undirected.long(), torch.full((directed,), last_U)]),
        torch.cat([graph.undirected2directed.long(), torch.full((undirected,), last_E)]),
        torch.cat([graph.bond_graph.long(), fill]),
    )
