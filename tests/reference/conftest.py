"""One thread for tiny products: faster than two, and the machine is shared."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
