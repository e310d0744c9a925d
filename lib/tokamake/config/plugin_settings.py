"""Sections whose settings depend on a plug-in: optimizer and schedule.

The constant SETTINGS of a plug-in is a literal, so reading it imports nothing. It has the settings
that the plug-in uses. The value of a field of the section is the published one. Any other name is
the plug-in's own setting; its value is one of:

- a default, which gives the type;
- a tuple of choices, the default first;
- a mapping with `default`, and bounds (`gt`, `ge`, `lt`, `le`) or a `description`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import GetJsonSchemaHandler, JsonSchemaValue
from pydantic_core import CoreSchema

from tokamake import plugins
from tokamake.config.fields import Settings


class PlugInSettings(Settings):
    """Section that names a plug-in and has its settings.

    Validation adds the published values for settings that the user left empty. A resolved run
    contains these values already and passes unchanged.
    """

    folder: ClassVar[str]
    """Folder of the plug-ins."""
    quantities: ClassVar[Mapping[str, str]] = {}
    """Setting → quantity that it sets, if the names differ. Settings of the same quantity exclude
    each other."""
    _own: dict[str, Any] = PrivateAttr(default_factory=dict)
    """Values of the plug-in's own settings."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate_plug_in(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        default = cls.model_fields["name"].default
        name = values.get("name", default) if isinstance(values, Mapping) else None
        if name not in plugins.names(cls.folder):
            return handler(values)  # The validators of the fields report the mistake.
        values = cls._add_published_values(name, values)
        own = _own_settings(cls, name)
        stated = {key: values[key] for key in own.model_fields}
        section = handler({key: value for key, value in values.items() if key not in stated})
        section._own = dict(own.model_validate(stated))
        return section

    @model_serializer(mode="wrap")
    def _with_own(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Only of this plug-in: a new plug-in must not change the digests of other runs.
        values: dict[str, Any] = handler(self)
        return values | self._own

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        section = handler.resolve_ref_schema(handler(schema))
        for name in plugins.names(cls.folder):
            own = _own_settings(cls, name).model_json_schema()
            section["properties"] |= own["properties"]
        return section

    @classmethod
    def _add_published_values(cls, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
        published = {key: _default(value) for key, value in _settings(cls, name).items()}
        used_quantities = {cls._quantity(key) for key in published}
        key_of_quantity: dict[str, str] = {}
        for key in cls._plug_in_keys():
            if (value := section.get(key)) is None:
                continue
            if (quantity := cls._quantity(key)) not in used_quantities:
                raise ValueError(
                    f"{key}: {value}: {name} does not use it, only {', '.join(published)}; "
                    "remove it"
                )
            if (first := key_of_quantity.setdefault(quantity, key)) != key:
                raise ValueError(f"{first} and {key} set the same quantity; keep one of them")
        missing = {k: v for k, v in published.items() if cls._quantity(k) not in key_of_quantity}
        return {**section, **missing}

    @classmethod
    def _plug_in_keys(cls) -> list[str]:
        """Settings that only some plug-ins use: fields, then own settings of plug-ins."""
        used = {key for name in plugins.names(cls.folder) for key in _settings(cls, name)}
        fields = [key for key in cls.model_fields if key in used]
        return list(dict.fromkeys((*cls.quantities, *fields, *sorted(used))))

    @classmethod
    def _quantity(cls, key: str) -> str:
        return cls.quantities.get(key, key)

    @property
    def own(self) -> dict[str, Any]:
        return dict(self._own)


def _settings(section: type[PlugInSettings], name: str) -> dict[str, Any]:
    settings: dict[str, Any] = plugins.constant(section.folder, name, "SETTINGS")
    return settings


def _default(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value["default"]
    return value[0] if isinstance(value, tuple) else value


class OwnSettings(Settings, use_attribute_docstrings=False):
    """Base of the settings of one plug-in: pydantic would search all modules for their source."""


@cache  # a model takes milliseconds to create
def _own_settings(section: type[PlugInSettings], name: str) -> type[Settings]:
    fields: dict[str, Any] = {}
    for key, value in _settings(section, name).items():
        if key in section.model_fields:
            continue
        options = dict(value) if isinstance(value, Mapping) else {"default": _default(value)}
        kind = Literal[value] if isinstance(value, tuple) else type(options["default"])
        fields[key] = kind, Field(**options)
    return create_model(name, __base__=OwnSettings, **fields)
