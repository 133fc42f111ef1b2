//! From messages in staging memory to batches on a device.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef};
use arrow_ipc::reader::{read_dictionary, read_record_batch};
use arrow_schema::{Schema, SchemaRef};

use crate::abi::guard;
use crate::data::DeviceRecordBatch;
use crate::device::{Device, DeviceId, Queue};
use crate::error::{Error, Result};
use crate::stream::ipc::IpcOptions;
use crate::stream::ipc::message::{Message, flatbuffer};
use crate::stream::upload::Uploads;
use crate::transfer::Staged;

/// Decodes messages, and copies the batches to a device.
#[derive(Debug)]
pub(super) struct Batches {
    /// Of the messages.
    whole: SchemaRef,
    projection: Option<Vec<usize>>,
    /// Of the batches, with the projection.
    schema: SchemaRef,
    /// For each dictionary's id a schema of one field that has it: arrow-rs looks for the first such field each time.
    fields: HashMap<i64, Schema>,
    dictionaries: HashMap<i64, ArrayRef>,
    /// What there is of each dictionary besides.
    kept: HashMap<i64, Kept>,
    /// How many bytes all dictionaries are that were compressed.
    decompressed: usize,
    /// The memory of dictionaries.
    staged: Staged,
    uploads: Uploads,
    pub(super) max_message_bytes: usize,
}

#[derive(Debug, Default)]
struct Kept {
    /// What is in [`Batches::staged`].
    staged: Vec<usize>,
    /// The dictionary's part of [`Batches::decompressed`].
    decompressed: usize,
    /// The lengths of all its arrays, nested ones included.
    values: i64,
}

/// Calls code of arrow-ipc, which panics at some of what is malformed.
pub(super) fn decode<T>(
    work: impl FnOnce() -> std::result::Result<T, arrow_schema::ArrowError>,
) -> Result<T> {
    match guard::call_foreign("decoding Arrow IPC", work) {
        Ok(decoded) => Ok(decoded?),
        Err(Error::Panic { message, .. }) => Err(Error::invalid("message", message)),
        Err(e) => Err(e),
    }
}

/// Converts a schema of arrow-ipc that is part of `bytes` bytes.
pub(super) fn schema(schema: arrow_ipc::Schema<'_>, bytes: usize) -> Result<SchemaRef> {
    if !schema.endianness().equals_to_target_endianness() {
        return Err(Error::invalid(
            "schema.endianness",
            "the values have the other order of bytes than this machine's",
        ));
    }
    // Fields may share their children and texts: then a few bytes stand for any number of them.
    let fields = schema.fields().into_iter().flatten().map(field_size);
    let pairs = schema
        .custom_metadata()
        .into_iter()
        .flatten()
        .map(pair_size);
    let size = fields.chain(pairs).sum::<usize>();
    if size > bytes.saturating_mul(16) {
        let message = format!(
            "{size} bytes of fields and metadata in {bytes}: more than 16 times what is there"
        );
        return Err(Error::invalid("schema", message));
    }
    // Deprecated from 60 on, for a function that 59 does not have.
    #[allow(deprecated)]
    decode(|| Ok(Arc::new(arrow_ipc::convert::fb_to_schema(schema))))
}

/// What a field and its children take at least.
fn field_size(field: arrow_ipc::Field<'_>) -> usize {
    let pairs = field.custom_metadata().into_iter().flatten().map(pair_size);
    let children = field.children().into_iter().flatten().map(field_size);
    let zone = field.type_as_timestamp().and_then(|of| of.timezone());
    let texts = [field.name(), zone].into_iter().flatten().map(str::len);
    32 + texts.chain(pairs).chain(children).sum::<usize>()
}

fn pair_size(pair: arrow_ipc::KeyValue<'_>) -> usize {
    32 + pair.key().map_or(0, str::len) + pair.value().map_or(0, str::len)
}

impl Batches {
    pub(super) fn new(whole: SchemaRef, queue: Queue, options: IpcOptions) -> Result<Self> {
        let schema = match &options.projection {
            Some(projection) => Arc::new(whole.project(projection)?),
            None => whole.clone(),
        };
        let mut fields = HashMap::new();
        for field in whole.flattened_fields() {
            // Deprecated without another way to find the field of a dictionary.
            #[allow(deprecated)]
            if let Some(id) = field.dict_id() {
                let of_field = || Schema::new(vec![field.clone()]);
                fields.entry(id).or_insert_with(of_field);
            }
        }
        Ok(Self {
            whole,
            projection: options.projection,
            schema,
            fields,
            dictionaries: HashMap::new(),
            kept: HashMap::new(),
            decompressed: 0,
            staged: Staged::default(),
            uploads: Uploads::new(queue),
            max_message_bytes: options.max_message_bytes,
        })
    }

    pub(super) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub(super) fn device(&self) -> &Device {
        self.uploads.device()
    }

    /// Keeps the dictionary in a message, which goes to the device with the first batch that uses it.
    pub(super) fn dictionary(&mut self, message: Message) -> Result<()> {
        let header = flatbuffer(&message.metadata)?;
        let dictionary = header.header_as_dictionary_batch();
        let dictionary = dictionary.ok_or_else(|| Error::invalid("message", "no dictionary"))?;
        let (id, version) = (dictionary.id(), header.version());
        let Some(field) = self.fields.get(&id) else {
            return Err(Error::invalid(
                "message",
                format!("no field has dictionary {id}"),
            ));
        };
        let kept = self.kept.entry(id).or_default();
        let nodes = dictionary.data().and_then(|data| data.nodes());
        let values = nodes.into_iter().flatten().map(|node| node.length());
        let values = values.fold(0, i64::saturating_add);
        kept.values = match dictionary.isDelta() {
            true => kept.values.saturating_add(values),
            false => values,
        };
        // Values without a byte get bits when they are joined.
        let fits =
            usize::try_from(kept.values).is_ok_and(|values| values <= self.max_message_bytes);
        if dictionary.isDelta() && !fits {
            let message = format!(
                "a dictionary of {} values; see IpcOptions::with_max_message_bytes",
                kept.values
            );
            return Err(Error::invalid("message", message));
        }
        let (body, all) = (&message.body, &mut self.dictionaries);
        decode(|| read_dictionary(body, dictionary, field, all, &version))?;
        for start in kept.staged.drain(..) {
            self.staged.remove(start);
        }
        if !dictionary.isDelta() {
            self.decompressed -= std::mem::take(&mut kept.decompressed);
        }
        kept.decompressed += message.decompressed;
        self.decompressed += message.decompressed;
        if self.decompressed > self.max_message_bytes {
            let message = format!(
                "dictionaries of {} bytes when they are decompressed; see IpcOptions::with_max_message_bytes",
                self.decompressed
            );
            return Err(Error::invalid("message", message));
        }
        if copies(self.uploads.device()) {
            // Joined or decompressed ones lie elsewhere.
            if message.body.strong_count() > 1 {
                kept.staged
                    .push(self.staged.add(message.body, message.aligned));
            }
            let values = self.dictionaries[&id].to_data();
            self.staged.add_array(&values, &mut kept.staged);
        }
        Ok(())
    }

    /// Copies the batch in a message to the device; `None` if the message is empty. The copies may run after this call returns. Waits
    /// for the oldest of earlier ones if there are many.
    pub(super) fn batch(&mut self, message: Message) -> Result<Option<DeviceRecordBatch>> {
        let header = flatbuffer(&message.metadata)?;
        let Some(batch) = header.header_as_record_batch() else {
            return Ok(None);
        };
        let host = decode(|| {
            read_record_batch(
                &message.body,
                batch,
                self.whole.clone(),
                &self.dictionaries,
                self.projection.as_deref(),
                &header.version(),
            )
        })?;
        self.uploads.make_room();
        if !copies(self.uploads.device()) {
            return self.uploads.upload(&host, &mut |_| Ok(())).map(Some);
        }
        let body = self.staged.add(message.body, message.aligned);
        let batch = self.staged.bring_batch(&host, self.uploads.queue());
        self.staged.remove(body);
        let batch = batch?;
        self.uploads.keep(&batch);
        Ok(Some(batch))
    }
}

/// Whether buffers are copied from staging memory: not on the CPU, which uses them where they are, and not to pages of the host's.
fn copies(device: &Device) -> bool {
    device.id() != DeviceId::CPU && !device.has_pages()
}
