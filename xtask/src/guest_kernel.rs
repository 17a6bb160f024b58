//! `cargo xtask guest-kernel`: builds Linux with LLFree in place of the buddy allocator.
//!
//! It takes Debian's source, our patches and options from `guest/linux`, and `guest/llfree`. A
//! built kernel is in the assets' cache, under a name that tells what it was made from, and is not
//! built again. Tests boot it as the kernel `llfree`.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, ensure};
use vmtest::assets::Kernel;

use crate::assets::apt::{self, Suite};
use crate::assets::cache::{self, Cache};
use crate::assets::initrd::Init;
use crate::cargo::workspace;

/// Name of the kernel with LLFree in tests.
const LABEL: &str = "llfree";
/// Name of the kernel with the buddy allocator, to which benchmarks compare.
const BUDDY_LABEL: &str = "buddy";
/// Name of the kernel in which Ebb itself runs, in tests.
const HOST_LABEL: &str = "host";
/// Options that a host needs and that no kernel of Debian's has.
const HOST_OPTIONS: &str = "CONFIG_USERFAULTFD=y\nCONFIG_IDLE_PAGE_TRACKING=y\n";
const ON: &str = "CONFIG_LLFREE=y";
const OFF: &str = "# CONFIG_LLFREE is not set";
const SUITE: &str = "bookworm";
const PACKAGE: &str = "linux-source-6.1";
/// File of the allocator that only tests in user space use.
const USER_SPACE_ONLY: &str = "check.c";
/// Number to change when the same files are built in another way.
const RECIPE: u32 = 1;

#[derive(clap::Args)]
pub struct Args {
    /// Look for a newer source even if the kernel exists
    #[arg(long)]
    refresh: bool,
    /// Build it with the buddy allocator instead, for benchmarks that compare both
    #[arg(long)]
    buddy: bool,
    /// Build a kernel with idle page tracking, for a host in which tests run Ebb and a VM
    #[arg(long, conflicts_with = "buddy")]
    host: bool,
    /// Print the compiler's output
    #[arg(long)]
    verbose: bool,
}

impl Args {
    /// Returns the arguments that build the host for tests.
    pub fn host() -> Args {
        Args { refresh: false, buddy: false, host: true, verbose: false }
    }

    fn label(&self) -> &'static str {
        match (self.host, self.buddy) {
            (true, _) => HOST_LABEL,
            (false, true) => BUDDY_LABEL,
            (false, false) => LABEL,
        }
    }
}

/// Builds a kernel, or finds it built.
///
/// # Errors
/// The kernel cannot be built. Tests get the reason.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let made = make(args);
    let mut kernels = vmtest::assets::load().unwrap_or_default();
    let result = made.as_ref().map(Kernel::clone).map_err(|error| format!("{error:#}"));
    kernels.insert(args.label().into(), result);
    vmtest::assets::store(&kernels)?;
    println!("{:<10} {}", args.label(), made?.package);
    Ok(())
}

fn make(args: &Args) -> anyhow::Result<Kernel> {
    let cache = Cache::open()?;
    let recipe = Recipe::read(args.label())?;
    let shelf = cache.directory(&format!("guest-kernel/{:016x}", recipe.stamp()))?;
    let directory = match cache::newest(&shelf).filter(|_| !args.refresh) {
        Some(directory) => directory,
        None => build(&cache, &recipe, &shelf, args)?,
    };
    let modules = cache.directory("guest-kernel/no-modules")?;
    // The kernel has everything built in.
    fs::write(modules.join("order"), "")?;
    Ok(Kernel {
        package: cache::base_name(&directory),
        vmlinuz: directory.join("vmlinuz"),
        initrd: Init::build()?.image(&cache, args.label(), &modules, None)?,
        qemu_directory: None,
        vprobe: Err(format!("vprobe is not built for the kernel {}", args.label())),
    })
}

/// Our own files that make the kernel, with their contents.
struct Recipe {
    patches: Vec<(PathBuf, Vec<u8>)>,
    options: String,
    allocator: Vec<(PathBuf, Vec<u8>)>,
}

impl Recipe {
    fn read(label: &str) -> anyhow::Result<Recipe> {
        let guest = workspace().join("guest");
        let config = guest.join("linux/config");
        let mut options = fs::read_to_string(&config).context("guest/linux/config")?;
        if label != LABEL {
            options = options.replace(ON, OFF);
        }
        if label == HOST_LABEL {
            options += HOST_OPTIONS;
        }
        let mut allocator = files(&guest.join("llfree"), &["c", "h"])?;
        allocator.retain(|(path, _)| cache::base_name(path) != USER_SPACE_ONLY);
        Ok(Recipe { patches: files(&guest.join("linux/patches"), &["patch"])?, options, allocator })
    }

    fn stamp(&self) -> u64 {
        let contents =
            self.patches.iter().chain(&self.allocator).map(|(path, text)| (path.file_name(), text));
        let mut hasher = DefaultHasher::new();
        (RECIPE, &self.options, contents.collect::<Vec<_>>()).hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the lines that the finished configuration has if all options took effect.
    fn wanted(&self) -> impl Iterator<Item = &str> {
        let is_option = |line: &&str| line.starts_with("CONFIG_") || line.starts_with("# CONFIG_");
        self.options.lines().filter(is_option)
    }
}

/// Returns the files with these extensions and their contents, sorted by path.
fn files(directory: &Path, extensions: &[&str]) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let is_wanted = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extensions.iter().any(|&one| extension == one))
    };
    paths.retain(is_wanted);
    paths.sort();
    paths.into_iter().map(|path| Ok((path.clone(), fs::read(&path)?))).collect()
}

fn build(cache: &Cache, recipe: &Recipe, shelf: &Path, args: &Args) -> anyhow::Result<PathBuf> {
    let start = Instant::now();
    let suite = Suite::open(cache, SUITE)?;
    let package = suite.package(PACKAGE)?;
    let directory = shelf.join(format!("{PACKAGE}_{}", package.version));
    if directory.exists() {
        return Ok(directory);
    }
    let label = args.label();
    println!("{label:<10} building from {PACKAGE} {}, which takes minutes", package.version);
    let (work, archives) = (cache.temporary()?, cache.temporary()?);
    for file in suite.download(&[package], archives.path())? {
        apt::unpack(&file, archives.path())?;
    }
    let archive = archives.path().join("usr/src").join(format!("{PACKAGE}.tar.xz"));
    run_in(work.path(), "tar", |tar| tar.arg("--extract").arg("--file").arg(&archive))?;
    let tree = work.path().join(PACKAGE);
    prepare(recipe, &tree)?;
    configure(recipe, &tree)?;
    compile(cache, &tree, args.verbose)?;
    let made = work.path().join("made");
    fs::create_dir(&made)?;
    fs::rename(tree.join("arch/x86/boot/bzImage"), made.join("vmlinuz"))?;
    fs::rename(tree.join(".config"), made.join("config"))?;
    fs::rename(&made, &directory)?;
    println!("{label:<10} built in {} s", start.elapsed().as_secs());
    Ok(directory)
}

/// Copies the allocator into the source tree, and patches the tree. The copy is thrown away with
/// the tree.
fn prepare(recipe: &Recipe, tree: &Path) -> anyhow::Result<()> {
    let allocator = tree.join("mm/llfree");
    fs::create_dir_all(&allocator)?;
    for (path, text) in &recipe.allocator {
        fs::write(allocator.join(cache::base_name(path)), text)?;
    }
    for (path, _) in &recipe.patches {
        let patch = File::open(path)?;
        run_in(tree, "patch", |command| {
            command.args(["--strip=1", "--fuzz=0", "--no-backup-if-mismatch"]).stdin(patch)
        })
        .with_context(|| cache::base_name(path))?;
    }
    Ok(())
}

fn configure(recipe: &Recipe, tree: &Path) -> anyhow::Result<()> {
    run_in(tree, "make", |make| make.args(["--silent", "tinyconfig"]))?;
    fs::write(tree.join("ebb.config"), &recipe.options)?;
    run_in(tree, "scripts/kconfig/merge_config.sh", |merge| {
        merge.args(["-m", ".config", "ebb.config"])
    })?;
    run_in(tree, "make", |make| make.args(["--silent", "olddefconfig"]))?;
    let config = fs::read_to_string(tree.join(".config"))?;
    for wanted in recipe.wanted() {
        // An option that the configuration does not know is off.
        let is_off = || {
            let name = wanted.strip_prefix("# ").and_then(|rest| rest.strip_suffix(" is not set"));
            name.is_some_and(|name| !config.contains(&format!("\n{name}=")))
        };
        let took_effect = config.lines().any(|line| line == wanted) || is_off();
        ensure!(took_effect, "guest/linux/config: {wanted} takes no effect");
    }
    Ok(())
}

fn compile(cache: &Cache, tree: &Path, verbose: bool) -> anyhow::Result<()> {
    let jobs = thread::available_parallelism()?.to_string();
    let compiled = cache.directory("ccache")?;
    run_in(tree, "make", |make| {
        make.args(["--silent", "bzImage", "CC=ccache gcc"])
            .args(["--jobs", &jobs])
            .args(["KBUILD_BUILD_USER=ebb", "KBUILD_BUILD_HOST=ebb"])
            // With a varying build time, ccache finds nothing that contains it.
            .arg("KBUILD_BUILD_TIMESTAMP=1970-01-01")
            .env("CCACHE_DIR", compiled)
            .env("CCACHE_MAXSIZE", "1G");
        if verbose { make.stderr(Stdio::inherit()) } else { make }
    })
}

fn run_in(
    directory: &Path,
    program: &str,
    add: impl FnOnce(&mut Command) -> &mut Command,
) -> anyhow::Result<()> {
    let mut command = Command::new(match program.contains('/') {
        true => directory.join(program),
        false => program.into(),
    });
    command.current_dir(directory).env("LC_ALL", "C").stdin(Stdio::null());
    add(&mut command);
    let output =
        command.output().with_context(|| format!("{program}: run scripts/setup kernel"))?;
    let printed = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&printed);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(20)..];
    ensure!(output.status.success(), "{program} fails: {}", last.join("\n"));
    Ok(())
}
