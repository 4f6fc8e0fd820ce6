"""What computes here has a name, and never none."""

import torch

from tinyds41 import machine


def test_a_processor_has_the_name_that_the_system_gives_it(monkeypatch):
    assert machine.device_name() == machine.device_name(torch.device("cpu")) != ""
    monkeypatch.setattr(machine, "_processor", lambda: None)
    assert machine.device_name() == machine.platform.machine() != ""


def test_a_graphics_card_is_asked_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {torch.device(device).index}")
    assert machine.device_name("cuda:3") == "card 3"


def test_a_system_that_tells_nothing_is_no_error(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", missing)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    assert machine._processor() is None
